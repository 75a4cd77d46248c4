# make lab    set up what is needed, copy the lessons to work/ (never over a file of yours), then open JupyterLab at the start page.
#             A server without a screen:
#             make lab ARGS="--no-browser --port 8890"
# make test   set up what is needed, then everything that must be green.
# make assignment TOPIC=ranks_and_messages   a lesson as an nbgrader assignment, in build/classroom/, for who teaches
# The rest:   make notebooks (manuscript -> notebooks), make benchmark, make constraints (newer versions; see README.md)

PYTHON ?= python3
BIN := .venv/bin
# Jupyter wants to hear it when the user is root, as in a container.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: lab test assignment notebooks benchmark constraints

lab:
	@$(PYTHON) tools/set_up.py
	@$(BIN)/python -m allhands start
	@PATH="$$(cd $(BIN) && pwd):$$PATH" $(BIN)/jupyter lab $(AS_ROOT) --LabApp.default_url=/lab/tree/notebooks/start_here.ipynb $(ARGS)

test:
	@$(PYTHON) tools/set_up.py --dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m pytest --junitxml=build/tests.xml $(ARGS)

assignment:
	$(if $(TOPIC),,$(error say which lesson: make assignment TOPIC=ranks_and_messages))
	@$(PYTHON) tools/set_up.py --dev
	@$(BIN)/python tools/make_assignment.py "$(TOPIC)"

notebooks:
	@$(PYTHON) tools/set_up.py --dev
	@$(BIN)/python tools/build_notebooks.py

benchmark:
	@$(PYTHON) tools/set_up.py --dev
	@$(BIN)/python tools/benchmark.py

constraints:
	@$(PYTHON) tools/set_up.py --dev --newest
