#!/bin/sh
# Install the servers that the tests start for themselves, where they are missing. The services that the packages bring
# along are not started: while this runs, policy-rc.d says no.
set -eu
PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin" # not in every user's

missing=""
[ -n "$(ls /usr/lib/postgresql/*/bin/initdb 2>/dev/null)" ] || command -v initdb >/dev/null || missing=" postgresql"
command -v mariadbd >/dev/null || missing="$missing mariadb-server"
[ -e /usr/lib/rabbitmq/bin/rabbitmq-server ] || missing="$missing rabbitmq-server"
[ -x /usr/sbin/pgbouncer ] || missing="$missing pgbouncer"
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing="$missing prometheus"
# What gives a process a clock that is off.
[ -n "$(ls /usr/lib/*/faketime/libfaketime.so.1 /usr/lib/faketime/libfaketime.so.1 2>/dev/null)" ] || missing="$missing faketime"
# The browser that looks at the dashboard's pages.
[ -x /usr/bin/chromedriver ] || missing="$missing chromium chromium-driver"
[ -e /usr/share/java/postgresql.jar ] || missing="$missing libpostgresql-jdbc-java"
# What installs Azurite and Mermaid.
command -v npm >/dev/null || missing="$missing nodejs npm"
# What mssql-python, the driver for SQL Server, loads at its first connection.
for library in libltdl.so.7:libltdl7 libodbc.so.2:libodbc2; do
    ldconfig -p 2>/dev/null | grep -q "${library%%:*}" || missing="$missing ${library##*:}"
done

as_root=""
[ "$(id -u)" = 0 ] || as_root="sudo -n"
policy=/usr/sbin/policy-rc.d

install_missing() {
    command -v apt-get >/dev/null || return 1
    [ -z "$as_root" ] || $as_root true 2>/dev/null || return 1
    if [ ! -e "$policy" ]; then
        trap '$as_root rm -f "$policy"' EXIT INT TERM
        printf '#!/bin/sh\nexit 101\n' | $as_root tee "$policy" >/dev/null
        $as_root chmod +x "$policy"
    fi
    echo "installing$missing"
    $as_root apt-get update -qq &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

if [ -n "$missing" ] && ! install_missing; then
    echo "not installed, and not to be installed from here:$missing. Tests that need it are skipped, in \`make test\`"
    echo "they fail. On Debian and Ubuntu: apt-get install$missing"
fi

azurite="${XDG_CACHE_HOME:-$HOME/.cache}/delayline/azurite"
if [ ! -e "$azurite/node_modules/azurite" ] && command -v npm >/dev/null; then
    echo "installing azurite"
    npm install --prefix "$azurite" --no-audit --no-fund --no-save --loglevel=error azurite@3.35.0 >/dev/null ||
        echo "azurite could not be installed: tests that need it are skipped, in \`make test\` they fail"
fi
