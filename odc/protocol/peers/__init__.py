"""The members of a job as one rank reaches them: by mapped memory (`local`), or over hosts (`remote`)."""
