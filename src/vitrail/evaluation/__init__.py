"""Measure a model that is not trained further: accuracy reports, comparisons, few-shot accuracy, similar images.

evaluate.py     `evaluate`: score a classifier on a data set, with intervals; writes report.json and figures
compare.py      `compare_model`: one row of a table of models
fewshot.py      `fewshot`: accuracy of simple classifiers that are fitted to the frozen features
neighbours.py   `find_similar_images`
"""
