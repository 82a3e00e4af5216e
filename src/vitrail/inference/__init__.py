"""From images to predictions: the predictor, passes over whole data sets, and class names."""
