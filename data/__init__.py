"""The data room: code that reads and shapes texts and tables. Corpora never live here."""
