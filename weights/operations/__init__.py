"""Operations on checkpoints and stores: import, externalize, repair, compact, collect garbage."""
