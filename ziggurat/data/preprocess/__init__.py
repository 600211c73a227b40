"""From raw columns to rows of tables: parsing, vocabularies, numbers, splits; fitted once, saved, replayed."""
