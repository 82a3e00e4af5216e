"""What a target is: one label, tags, numbers, levels or attributes of an image; how it is learned and answered.

`task.py` has the interface, `registry.py` all kinds. For a task of your own see docs/tasks.md.
"""
