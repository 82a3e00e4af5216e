"""Look through a data set before anyone trains on it: what is broken, doubled, or wrongly labelled."""
