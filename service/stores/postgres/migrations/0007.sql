-- A namespace keeps its id, also in a backup or a copy, and another one of its name has another: a key
-- opens only the one that it was made for. Namespaces that existed before have an empty id, and so have
-- their keys.
ALTER TABLE heed.namespaces ADD COLUMN namespace_id text NOT NULL DEFAULT '';
ALTER TABLE heed.keys ADD COLUMN namespace_id text NOT NULL DEFAULT '';  -- of the one it is bound to
