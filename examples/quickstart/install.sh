#!/bin/sh
# Installs into .venv at the pinned versions: `examples/quickstart/install.sh -e '.[test]'`.
#
# By uv where there is one and pip has no index, cache of wheels or constraints of its own, which uv would not read.
set -eu
export PIP_USE_PEP517=1 # the only way of newer releases of pip; older ones warn of theirs
configured=$(.venv/bin/pip config list 2>/dev/null | grep -E 'index|find-links|constraint' || true)
if command -v uv > /dev/null && [ -z "$configured" ]; then
    exec uv pip install --quiet --python .venv/bin/python -c constraints.txt "$@"
fi
# Compiling all files takes longer than the rest; Python compiles the few that are imported.
exec .venv/bin/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt "$@"
