-- Distribute the tables of a PostgreSQL store over the workers of a Citus cluster.
--
--   PGOPTIONS='-c heed.shards=32' psql -h coordinator -v ON_ERROR_STOP=1 -f citus.sql heed
--
-- Run it on the coordinator, as the owner of the schema, once Heed has made the schema and while no
-- process of Heed is connected. It is one transaction: all rows move, or none does. Run it again
-- after an upgrade of Heed that adds a table of users: tables that are distributed already stay.
--
-- Rows of users and of their events are on workers, one user's on one of them, by `user_key`; ids of
-- events are by `event_key`, since they are unique in the namespace. All other tables are small and
-- stay on the coordinator: what every write needs, such as the numbers of items, must not wait for a
-- worker that is down.

DO $$
DECLARE
  shards integer := coalesce(nullif(current_setting('heed.shards', true), ''), '32');
  part record;
BEGIN
  IF NOT EXISTS (SELECT FROM pg_extension WHERE extname = 'citus') THEN
    RAISE EXCEPTION 'the database has no extension citus: CREATE EXTENSION citus, first';
  END IF;
  IF NOT EXISTS (SELECT FROM pg_dist_node WHERE isactive AND shouldhaveshards) THEN
    RAISE EXCEPTION 'the cluster has no workers: SELECT citus_add_node(…), first';
  END IF;
  SET LOCAL statement_timeout = 0;
  LOCK TABLE heed.users, heed.events, heed.event_ids IN ACCESS EXCLUSIVE MODE;
  IF EXISTS (SELECT FROM pg_stat_activity
              WHERE datname = current_database() AND backend_type = 'client backend'
                AND NOT starts_with(lower(application_name), 'citus')
                AND pid <> pg_backend_pid()) THEN
    RAISE EXCEPTION 'others are connected to the database: stop all of Heed''s processes';
  END IF;

  -- Citus spreads the rows: partitions within each shard would only be many more tables.
  IF EXISTS (SELECT FROM pg_class WHERE oid = 'heed.events'::regclass AND relkind = 'p') THEN
    EXECUTE 'ALTER TABLE heed.events RENAME TO partitioned_events';
    EXECUTE 'ALTER INDEX heed.events_pkey RENAME TO partitioned_events_pkey';
    EXECUTE 'CREATE TABLE heed.events (LIKE heed.partitioned_events INCLUDING ALL)';
  END IF;
  FOR part IN
    SELECT * FROM (VALUES  -- tables beside one another have equal keys on one worker
      (1, 'heed.users', 'user_key', 'none'),
      (2, 'heed.gone_users', 'user_key', 'heed.users'),
      (3, 'heed.events', 'user_key', 'heed.users'),
      (4, 'heed.vectors', 'user_key', 'heed.users'),
      (5, 'heed.claims', 'user_key', 'heed.users'),
      (6, 'heed.replaced_profiles', 'user_key', 'heed.users'),
      (7, 'heed.tallies', 'user_key', 'heed.users'),
      (8, 'heed.event_ids', 'event_key', 'none')
    ) AS placed (place, name, key, beside) ORDER BY place
  LOOP
    CONTINUE WHEN EXISTS (
      SELECT FROM pg_dist_partition WHERE logicalrelid = part.name::regclass);
    PERFORM create_distributed_table(
      part.name::regclass, part.key, colocate_with => part.beside,
      shard_count => CASE WHEN part.beside = 'none' THEN shards END);
    -- Its rows are on the workers now; those that the coordinator had are left over.
    PERFORM truncate_local_data_after_distributing_table(part.name::regclass);
  END LOOP;
  IF to_regclass('heed.partitioned_events') IS NOT NULL THEN
    EXECUTE 'INSERT INTO heed.events SELECT * FROM heed.partitioned_events';
    EXECUTE 'DROP TABLE heed.partitioned_events';
  END IF;
END $$;
