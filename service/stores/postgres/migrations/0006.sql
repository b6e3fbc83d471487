-- A row whose indexed columns stay as they are is updated without a new entry in any index, as long as
-- its page has room. Each append gives its users new versions; of an index by version every one of
-- them cost an entry in each of the four. A range has the versions of 128 transactions: whoever is
-- written again within them costs none.
--
-- Each statement is a text of its own, since Citus hands its workers the text that it was in.
DO $$ BEGIN
  EXECUTE 'ALTER TABLE heed.users ADD COLUMN version_range bigint NOT NULL
             GENERATED ALWAYS AS (version >> 17) STORED';
  EXECUTE 'DROP INDEX heed.users_by_version';
  EXECUTE 'CREATE INDEX users_by_version_range ON heed.users (namespace_no, version_range)';
END $$;
