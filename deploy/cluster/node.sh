#!/bin/sh
# Runs Patroni, which runs PostgreSQL, or a command that needs its passwords:
#   docker compose exec postgres-1 sh /cluster/node.sh patronictl switchover
# Passwords are files; Patroni takes them as variables.
set -eu
export PATRONI_NAME="$HOSTNAME"
export PATRONI_RESTAPI_CONNECT_ADDRESS="$HOSTNAME:8008"
export PATRONI_POSTGRESQL_CONNECT_ADDRESS="$HOSTNAME:5432"
PATRONI_SUPERUSER_PASSWORD=$(cat /credentials/superuser)
PATRONI_REPLICATION_PASSWORD=$(cat /credentials/replication)
PATRONI_RESTAPI_PASSWORD=$(cat /credentials/patroni)
export PATRONI_SUPERUSER_PASSWORD PATRONI_REPLICATION_PASSWORD PATRONI_RESTAPI_PASSWORD
export PATRONI_RESTAPI_USERNAME=patroni # guards what changes something
export PATRONICTL_CONFIG_FILE=/cluster/patroni.yml
[ $# -gt 0 ] || set -- patroni /cluster/patroni.yml
exec "$@"
