"""Tables of the source works on small real data, one command each."""
