"""From what a user wrote to values: files, short forms, other spellings, and refusals in one line."""
