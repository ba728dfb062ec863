"""Records of the stress tool as a page for a browser."""
