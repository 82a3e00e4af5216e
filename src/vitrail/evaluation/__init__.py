"""Measure a model that is not trained further: accuracy reports, comparisons, few-shot accuracy, similar images.

evaluate.py     `evaluate`: score a classifier on a data set, with intervals; writes report.json and figures
compare.py      `compare_models`: models side by side, with accuracy, speed and cost
fewshot.py      `fewshot`: accuracy of simple classifiers that are fitted to the frozen features
neighbours.py   `find_similar`: the images of a data set that are most similar to one image
"""
