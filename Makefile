.PHONY: check test slow torture docs

check:            ## format, lint, types
	ruff format --check .
	ruff check .
	mypy

test:             ## what runs on every change
	pytest

slow:             ## what takes minutes
	pytest -m slow

MINUTES ?= 30

torture:          ## training under faults, then serving under load and attack, so many minutes each
	PYTHONPATH=tests/torture python -m torture_training --minutes $(MINUTES) --out torture-training.json
	PYTHONPATH=tests/serving:tests/data:tests/torture python -m torture_serving --minutes $(MINUTES) --out torture-serving.json

docs:             ## the documentation, into site/
	mkdocs build --strict
