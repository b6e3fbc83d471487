-- Parts of an installation that its machines share, beside the records.

-- Files that machines fetch from one another, in sets that never change once they are complete. A
-- set is written chunk by chunk, each in a transaction of its own: one long transaction would hold
-- up whoever follows the log.

CREATE SEQUENCE heed.file_set_numbers;

CREATE TABLE heed.file_sets (
  set_no       bigint NOT NULL,
  size         bigint NOT NULL DEFAULT 0,   -- bytes of all chunks
  written      timestamptz NOT NULL DEFAULT clock_timestamp(),  -- when its last chunk was
  namespace_no integer NOT NULL,
  chunks       integer NOT NULL DEFAULT 0,
  state        text NOT NULL DEFAULT 'incomplete'
               CHECK (state IN ('incomplete', 'complete', 'removed', 'abandoned')),
  kind         text COLLATE "C" NOT NULL,
  name         text COLLATE "C" NOT NULL,
  description  bytea NOT NULL,
  PRIMARY KEY (namespace_no, set_no)
);
-- A removed set keeps its row, so that its name is never given to other bytes.
CREATE UNIQUE INDEX file_sets_by_name ON heed.file_sets (namespace_no, kind, name)
  WHERE state IN ('complete', 'removed');

CREATE TABLE heed.file_chunks (
  set_no       bigint NOT NULL,
  namespace_no integer NOT NULL,
  chunk_no     integer NOT NULL,  -- in the whole set, from 0
  file         text COLLATE "C" NOT NULL,
  digest       bytea NOT NULL,    -- SHA-256 of the data
  data         bytea NOT NULL,
  PRIMARY KEY (namespace_no, set_no, chunk_no)
);
-- Weights and indexes do not become smaller by compression.
ALTER TABLE heed.file_chunks ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE heed.active_sets (
  number       bigint NOT NULL,   -- of activations; only grows
  removals     bigint NOT NULL,   -- of sets; only grows
  namespace_no integer NOT NULL,
  kind         text COLLATE "C" NOT NULL,
  name         text COLLATE "C",  -- NULL: none is active
  PRIMARY KEY (namespace_no, kind)
);

CREATE TABLE heed.jobs (
  namespace_no integer NOT NULL,
  has_ended    boolean NOT NULL DEFAULT false,
  is_cancelled boolean NOT NULL DEFAULT false,  -- somebody has requested that it be stopped
  job_id       text COLLATE "C" NOT NULL,       -- sorts by time
  document     bytea NOT NULL,                  -- JSON
  PRIMARY KEY (namespace_no, job_id)
);

CREATE TABLE heed.job_leases (  -- the right to run jobs of a namespace: one at a time has it
  expires      timestamptz NOT NULL,  -- unless it is renewed
  namespace_no integer PRIMARY KEY,
  holder       uuid NOT NULL
);
