"""Tables whose vocabularies grow: batches of numbers of ids become batches of rows, and new rows are drawn."""
