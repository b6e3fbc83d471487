-- Every question asks whether its user's history has changed, mostly to hear that it has not. As one
-- statement the server would plan the reading of events each time, which takes longer than the
-- reading of the user's row; in a function it plans what it comes to, and keeps the plan of the row.
--
-- A plan of the partitioned events for any user would lock all partitions: `auto` never finds it
-- cheaper than one for the very user. A plan that was kept since the table was small must not read
-- all of it.
CREATE FUNCTION heed.changed_history(
  of_namespace integer, of_key bigint, of_id text,
  known_version bigint, known_generation bigint, known_seq integer)
RETURNS TABLE (version bigint, generation bigint, has_vectors boolean, profile bytea, packed bytea)
LANGUAGE plpgsql STABLE SET plan_cache_mode = auto SET enable_seqscan = off AS $$
DECLARE
  first_free integer;
  after_seq  integer := 0;
BEGIN
  SELECT users.version, users.generation, users.has_vectors, users.profile, users.next_seq
    INTO version, generation, has_vectors, profile, first_free
    FROM heed.users
   WHERE users.namespace_no = of_namespace AND users.user_key = of_key AND users.user_id = of_id;
  IF NOT FOUND THEN
    RETURN;
  END IF;
  IF version <> known_version THEN
    IF generation = known_generation THEN
      after_seq := known_seq;
    END IF;
    -- At most so many events came after a seq. Searched from the newest on, they are mostly found at
    -- once; only an event with an older timestamp lies further back.
    SELECT string_agg(int8send(found.timestamp) || int4send(found.seq) || int4send(found.item_no)
                      || int4send(found.type_no) || float8send(found.weight), ''::bytea)
      INTO packed
      FROM (SELECT events.timestamp, events.seq, events.item_no, events.type_no, events.weight
              FROM heed.events
             WHERE events.namespace_no = of_namespace AND events.user_key = of_key
               AND events.seq > after_seq
             ORDER BY events.timestamp DESC, events.seq DESC
             LIMIT greatest(0, first_free - 1 - after_seq)) AS found;
  END IF;
  RETURN NEXT;
END $$;
