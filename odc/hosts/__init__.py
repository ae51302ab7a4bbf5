"""What ranks on several hosts need besides: mirrors of words, links, cached shards and sums."""
