"""Operations over several servers: broadcasts, merged responses, model lists, settings, health."""
