"""L5: the science. One file, one question; pure functions on a problem, one result each."""
