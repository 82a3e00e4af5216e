.PHONY: check test slow coverage mutants torture sbom docs

check:            ## format, lint, types
	ruff format --check .
	ruff check .
	mypy

test:             ## what runs on every change
	pytest

slow:             ## what takes minutes
	pytest -m slow

coverage:         ## which lines of src all tests run; takes longer than both of the above
	coverage erase
	coverage run -m pytest
	coverage run -m pytest -m slow
	coverage combine -q
	coverage report --skip-covered --sort=cover

mutants:          ## 200 small changes of the code: how many do the tests notice?
	python tools/mutants.py --count 200 --seed 0 --out mutants.jsonl

MINUTES ?= 30

torture:          ## training under faults, then serving under load and attack, so many minutes each
	status=0; export PYTHONPATH=tests/serving:tests/data:tests/torture; \
	python -m torture_training --minutes $(MINUTES) --out torture-training.json || status=1; \
	python -m torture_serving --minutes $(MINUTES) --out torture-serving.json || status=1; \
	exit $$status

sbom:             ## what this environment is made of, with versions and licences (CycloneDX), into sbom.json
	cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o sbom.json
	python -c "import json; print(len(json.load(open('sbom.json'))['components']), 'packages in sbom.json')"

docs:             ## the documentation, into site/
	mkdocs build --strict
