"""Rich renderings of records. A view takes plain data and draws it; it never touches the engine."""
