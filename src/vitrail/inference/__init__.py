"""From images to answers: the engine that computes them, the predictor, passes over data sets, class names."""
