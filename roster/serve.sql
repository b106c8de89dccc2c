-- Works out anew what is served, after everything else is in its tables: of the chosen authors alone, where nothing has
-- changed that all depend on. It is kept, so that asking costs nothing.
DELETE FROM served WHERE {chosen};
INSERT INTO served FROM rule WHERE {chosen} ORDER BY base, author;
