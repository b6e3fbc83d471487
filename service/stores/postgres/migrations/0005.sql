ALTER TABLE heed.installation
  ADD COLUMN system_identifier bigint,  -- of the servers whose transaction ids make the ticks
  ADD COLUMN timeline integer,          -- of these servers
  ADD COLUMN restoring text;            -- the backup whose restore has not finished
