# shellcheck shell=bash
# Defines `find_python 3.12`, which prints the path of that Python, or fails if there is none. It
# searches PATH and pyenv's versions, because pyenv's shims fail for versions that are not selected.
find_python() {
    local candidate found=()
    local check="import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')"
    if command -v pyenv > /dev/null; then
        mapfile -t found < <(pyenv versions --bare | grep -E "^${1/./\\.}(\.[0-9]+)?$" | sort -rV)
        found=("${found[@]/#/$(pyenv root)/versions/}")
        found=("${found[@]/%//bin/python}")
    fi
    for candidate in "python$1" python3 "${found[@]}"; do
        if "$candidate" -c "$check" 2> /dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}
