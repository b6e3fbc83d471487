CREATE TABLE heed.copies (  -- of other stores to a namespace
  written      bigint NOT NULL,  -- the greatest number that the copy's last change may have used
  namespace_no integer PRIMARY KEY,
  origin       text NOT NULL,
  position     text COLLATE "C" NOT NULL
);
