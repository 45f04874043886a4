#!/usr/bin/env bash
# Builds the wheel, installs it with its dependencies in a new environment, and runs smoke.py there, in a
# folder from where the checkout cannot be imported.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV

"$checkout/.venv/bin/python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$work/dist" "$checkout"
"$checkout/.venv/bin/python" -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check --no-input \
    --constraint "$checkout/constraints.txt" "$work"/dist/*.whl pytest
cp "$checkout/tests/packaging/smoke.py" "$work/"
cd "$work"
"$work/env/bin/python" -m pytest -W error -p no:cacheprovider smoke.py
