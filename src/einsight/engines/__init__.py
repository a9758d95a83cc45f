"""One module per way of computing a problem."""
