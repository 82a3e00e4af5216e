"""Measure a model that is not trained further: accuracy reports, comparisons, few-shot accuracy, similar images.

evaluate.py     `evaluate`: score a model on a data set, with intervals; writes report.json and figures
score_task.py   `score_task`: the same for tags, numbers and other tasks, on data that is open
compare.py      `compare_models`: models side by side, with accuracy, speed and cost
fewshot.py      `fewshot`: accuracy of simple classifiers that are fitted to the frozen features
neighbours.py   `find_similar`: the images of a data set that are most similar to one image
"""
