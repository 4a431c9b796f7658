# Sourced by start and test: sets $python to a Python 3.11, or says what to install and exits.
python=
for candidate in python3.11 python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    found=$(python3 --version 2>&1 || echo "no python3")
    echo "Blockhouse needs Python 3.11; this machine has: $found." >&2
    echo "On Debian 12: apt-get install python3 python3-venv. Elsewhere install Python 3.11 and run this again." >&2
    exit 1
fi
