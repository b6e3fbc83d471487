#!/bin/sh
# Creates Heed's role and database, once, on the node that Patroni has initialised; $1 is its address.
set -eu
psql "$1" --quiet --no-psqlrc --set ON_ERROR_STOP=1 --set password="$(cat /credentials/heed)" <<'SQL'
CREATE ROLE heed LOGIN PASSWORD :'password';
CREATE DATABASE heed OWNER heed;
SQL
