"""How the next token is chosen: options as arrays, the programs that apply them, and masks from grammars."""
