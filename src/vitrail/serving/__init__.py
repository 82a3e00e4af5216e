"""Models behind HTTP: an app, a batching queue of our own, and a page for anyone with a photo."""
