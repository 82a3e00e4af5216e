.PHONY: check test slow docs

check:            ## format, lint, types
	ruff format --check .
	ruff check .
	mypy

test:             ## what runs on every change
	pytest

slow:             ## what takes minutes
	pytest -m slow

docs:             ## the documentation, into site/
	mkdocs build --strict
