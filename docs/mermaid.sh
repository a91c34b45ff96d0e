#!/bin/sh
# Put Mermaid, which draws the diagrams, into docs/assets: the site loads nothing from other servers.
set -eu

version=11.16.0
here=$(dirname "$0")/assets
[ "$(cat "$here/mermaid.version" 2>/dev/null)" != "$version" ] || [ ! -s "$here/mermaid.min.js" ] || exit 0

give_up() {
    echo "Mermaid $1: the pages show the text of their diagrams, and tests/docs fails in \`make test\`"
    exit 0
}
command -v npm >/dev/null || give_up "needs npm (apt-get install nodejs npm)"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM
echo "downloading mermaid $version"
npm pack --silent --pack-destination "$work" "mermaid@$version" >/dev/null || give_up "could not be downloaded"
tar -xzf "$work/mermaid-$version.tgz" -C "$work" package/dist/mermaid.min.js
mkdir -p "$here"
mv "$work/package/dist/mermaid.min.js" "$here/mermaid.min.js"
echo "$version" >"$here/mermaid.version"
