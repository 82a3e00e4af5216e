"""From images as they come to answers: the predictor, passes over data sets, class names."""
