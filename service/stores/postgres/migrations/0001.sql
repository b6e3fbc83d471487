-- Sizes of a row and its indexes are what an event, an item or a user costs, so the eight-byte
-- columns come first: PostgreSQL aligns each column to its own size.
--
-- A tick numbers a transaction: 1,024 times its id, which grows with every transaction that writes.
-- A row that several transactions change in another order than that of their ids takes at least
-- the next number, so that versions of one row only grow.

CREATE TABLE heed.installation (
  is_only   boolean PRIMARY KEY DEFAULT true CHECK (is_only),
  tick_base bigint NOT NULL DEFAULT 0  -- added to ticks, where a dump was restored elsewhere
);
INSERT INTO heed.installation DEFAULT VALUES;

CREATE TABLE heed.namespaces (
  namespace_no integer PRIMARY KEY,
  name         text COLLATE "C" NOT NULL UNIQUE,
  created      bigint NOT NULL,            -- microseconds UTC
  catalogue    bigint NOT NULL DEFAULT 0,  -- tick of the catalogue's last change
  items        bigint NOT NULL DEFAULT 0,  -- in the catalogue
  item_bytes   bigint NOT NULL DEFAULT 0,  -- of their documents and embeddings
  keys         bigint NOT NULL DEFAULT 0,  -- tick of the last change of an API key
  names        bigint NOT NULL DEFAULT 0   -- tick of the last deletion of interned names
);

CREATE SEQUENCE heed.namespace_numbers;
CREATE SEQUENCE heed.item_numbers MAXVALUE 2147483647;
CREATE SEQUENCE heed.type_numbers MAXVALUE 2147483647;

CREATE TABLE heed.users (
  user_key     bigint NOT NULL,   -- 63 bits of a hash of user_id
  user_no      bigint NOT NULL,   -- small, for followers of the log; never given twice
  version      bigint NOT NULL,
  generation   bigint NOT NULL,
  namespace_no integer NOT NULL,
  next_seq     integer NOT NULL,
  has_vectors  boolean NOT NULL,
  user_id      text COLLATE "C" NOT NULL,
  profile      bytea,
  PRIMARY KEY (namespace_no, user_key)
) WITH (fillfactor = 80);
CREATE INDEX users_by_version ON heed.users (namespace_no, version);
CREATE INDEX users_by_id ON heed.users (namespace_no, user_id);
CREATE INDEX users_by_no ON heed.users (namespace_no, user_no);

CREATE TABLE heed.gone_users (  -- numbers whose user was forgotten
  user_key     bigint NOT NULL,
  user_no      bigint NOT NULL,
  change       bigint NOT NULL,  -- tick
  namespace_no integer NOT NULL,
  PRIMARY KEY (namespace_no, user_key, user_no)
);
CREATE INDEX gone_users_by_change ON heed.gone_users (namespace_no, change);

CREATE TABLE heed.items (
  change       bigint,            -- tick of the last put or delete; NULL: seen in events alone
  namespace_no integer NOT NULL,
  item_no      integer NOT NULL,
  hidden       boolean NOT NULL DEFAULT false,
  item_id      text COLLATE "C" NOT NULL,
  document     bytea,             -- NULL: not in the catalogue
  embedding    bytea,
  PRIMARY KEY (namespace_no, item_no),
  UNIQUE (namespace_no, item_id)
);
CREATE INDEX items_by_change ON heed.items (namespace_no, change) WHERE change IS NOT NULL;

CREATE TABLE heed.types (
  namespace_no integer NOT NULL,
  type_no      integer NOT NULL,
  type         text COLLATE "C" NOT NULL,
  PRIMARY KEY (namespace_no, type_no),
  UNIQUE (namespace_no, type)
);

-- The key carries what a history is read from, so that most reads touch the index alone.
CREATE TABLE heed.events (
  user_key     bigint NOT NULL,
  timestamp    bigint NOT NULL,
  weight       double precision NOT NULL,
  namespace_no integer NOT NULL,
  seq          integer NOT NULL,
  item_no      integer NOT NULL,
  type_no      integer NOT NULL,
  import_no    integer,          -- that it goes with: the one that stored it, until it is undone
  event_key    uuid NOT NULL,
  event_id     text,             -- NULL: event_key in its canonical form
  PRIMARY KEY (namespace_no, user_key, timestamp, seq) INCLUDE (item_no, type_no, weight)
) PARTITION BY HASH (namespace_no, user_key);

-- Apart, since ids are unique in the namespace and events are spread by user.
CREATE TABLE heed.event_ids (
  event_key    uuid NOT NULL,
  user_key     bigint NOT NULL,
  timestamp    bigint NOT NULL,
  digest       bigint NOT NULL,
  namespace_no integer NOT NULL,
  seq          integer NOT NULL,
  PRIMARY KEY (namespace_no, event_key)
);

CREATE TABLE heed.vectors (  -- apart, so that rows without any stay small
  user_key     bigint NOT NULL,
  namespace_no integer NOT NULL,
  seq          integer NOT NULL,
  key          bytea,
  value        bytea,
  PRIMARY KEY (namespace_no, user_key, seq)
);

-- Counts are sums of rows: each change adds some, and now and then many are replaced by one. A
-- single row for each count would have all writers wait for one another.
CREATE TABLE heed.tallies (
  user_key     bigint NOT NULL,  -- of any user of the change
  users        bigint NOT NULL,
  events       bigint NOT NULL,
  dislikes     bigint NOT NULL,  -- among the events
  bytes        bigint NOT NULL,
  namespace_no integer NOT NULL,
  item_no      integer NOT NULL  -- 0: of no item
);
CREATE INDEX tallies_by_namespace ON heed.tallies (namespace_no);

CREATE TABLE heed.imports (
  started      bigint NOT NULL,  -- microseconds UTC
  namespace_no integer NOT NULL,
  import_no    integer NOT NULL,
  undone       boolean NOT NULL, -- all that it stored has been taken back
  source       text NOT NULL,
  PRIMARY KEY (namespace_no, import_no)
);

CREATE TABLE heed.claims (  -- of imports on events that were stored before
  user_key     bigint NOT NULL,
  namespace_no integer NOT NULL,
  import_no    integer NOT NULL,
  first_seq    integer NOT NULL,
  last_seq     integer NOT NULL,
  PRIMARY KEY (namespace_no, user_key, import_no, first_seq)
);

CREATE TABLE heed.replaced_items (  -- what imports have replaced, for undoing them
  written      bigint NOT NULL,     -- digest of what the import wrote
  namespace_no integer NOT NULL,
  item_no      integer NOT NULL,
  import_no    integer NOT NULL,
  document     bytea,               -- what was there before; NULL: nothing
  embedding    bytea,
  PRIMARY KEY (namespace_no, item_no, import_no)
);

CREATE TABLE heed.replaced_profiles (
  user_key     bigint NOT NULL,
  written      bigint NOT NULL,
  namespace_no integer NOT NULL,
  import_no    integer NOT NULL,
  document     bytea,
  PRIMARY KEY (namespace_no, user_key, import_no)
);

CREATE TABLE heed.forgotten (  -- ledger of forgotten users
  forgotten    bigint NOT NULL,  -- microseconds UTC
  events       bigint NOT NULL,
  namespace_no integer NOT NULL,
  digest       bytea NOT NULL,   -- SHA-256 of the salt and the user_id
  salt         bytea NOT NULL,
  PRIMARY KEY (namespace_no, digest, forgotten)
);
CREATE INDEX forgotten_by_time ON heed.forgotten (namespace_no, forgotten, digest);

CREATE TABLE heed.unused_names (  -- that deleted events used, and maybe no other event does
  noted        bigint NOT NULL,   -- tick
  namespace_no integer NOT NULL,
  number       integer NOT NULL,
  kind         text NOT NULL CHECK (kind IN ('items', 'types')),
  PRIMARY KEY (namespace_no, kind, number)
);

CREATE TABLE heed.scenarios (
  written      bigint NOT NULL,  -- microseconds UTC
  namespace_no integer NOT NULL,
  version      integer NOT NULL, -- from 1; the last one is in use
  name         text COLLATE "C" NOT NULL,
  document     bytea,            -- JSON; NULL: deleted
  fallback     text COLLATE "C",
  PRIMARY KEY (namespace_no, name, version)
);
CREATE INDEX scenarios_by_fallback ON heed.scenarios (namespace_no, fallback)
  WHERE fallback IS NOT NULL;

CREATE TABLE heed.keys (
  created      bigint NOT NULL,  -- microseconds UTC, as the next two
  expires      bigint,
  revoked      bigint,
  namespace_no integer NOT NULL, -- whose store holds the key
  key_id       text COLLATE "C" NOT NULL,
  name         text NOT NULL,
  namespace    text NOT NULL,    -- that the key is bound to
  scopes       text NOT NULL,    -- separated by commas
  rate         text,
  digest       bytea NOT NULL,   -- SHA-256 of the secret
  PRIMARY KEY (namespace_no, key_id)
);

-- Requests of API keys in the current window of their rate and in the one before. What a crash of
-- the server loses lets a key send its amount once more.
CREATE UNLOGGED TABLE heed.rate_windows (
  number       bigint NOT NULL,  -- of the window
  spent        double precision NOT NULL,  -- seconds of the window
  previous     bigint NOT NULL,
  current      bigint NOT NULL,
  granted      bigint NOT NULL,  -- to the last caller
  namespace_no integer NOT NULL,
  seconds      integer NOT NULL,
  key_id       text COLLATE "C" NOT NULL,
  PRIMARY KEY (namespace_no, key_id, seconds)
) WITH (fillfactor = 50);
