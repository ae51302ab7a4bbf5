"""One long sample over several ranks: pieces that exchange keys and values on demand, without a collective."""

from odc.split.attention import attend
from odc.split.piece import PieceInputs, SamplePiece
from odc.split.splitter import Splitter, ranks_of_host

__all__ = ["PieceInputs", "SamplePiece", "Splitter", "attend", "ranks_of_host"]
