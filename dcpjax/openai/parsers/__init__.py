"""What a model writes in an answer -> content, reasoning and tool calls, while the text still arrives.

A `MessageParser` is fed pieces of text and gives out deltas of OpenAI's streamed messages. Whatever the pieces are, the
deltas add up to the same message. What looks like a tool call but is none stays content, every character of it.
"""
