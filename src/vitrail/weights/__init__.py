"""Read and write checkpoints of every format, without running code from a file.

`load`, `save` and `convert` are for users. `source` finds the files, `files` opens them, and each module of `formats/`
recognises one library's format and lists its tensor rules.
"""
