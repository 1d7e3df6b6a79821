"""An HTTP server that speaks OpenAI's API.

    connection   bytes of a connection, bounded in time and size        uvicorn
    auth bounds  who may ask, and how much                              ASGI
    app          paths                                                  starlette
    page         the page at /
    answers      a request body -> an answer, whole or streamed         the event loop
    engine_thread                                                       the one thread that steps the model

The event loop never waits for a step: it puts commands into the queue of the engine's thread, which publishes tokens to
the loop after every step. What bodies mean is the business of `openai`; nothing here knows it.
"""
