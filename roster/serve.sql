-- Works out anew what is served, after everything else is in its tables. It is kept, so that asking costs nothing.
DELETE FROM served;
INSERT INTO served FROM rule ORDER BY base, author;
