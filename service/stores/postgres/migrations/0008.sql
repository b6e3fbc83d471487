-- Whether the copy was compared with its source and is the same; NULL: of an earlier Heed.
ALTER TABLE heed.copies ADD COLUMN is_whole boolean;
