"""Ask a server for the capital of France with the official clients: chat completions, completions, responses,
messages.

KVANT_URL is the server's address, KVANT_MODEL its model.
"""

import os

from anthropic import Anthropic
from openai import OpenAI

URL, MODEL = os.environ["KVANT_URL"], os.environ["KVANT_MODEL"]
QUESTION = "What is the capital of France?"
MESSAGES = [{"role": "user", "content": QUESTION}]


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key="none")
    chat = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, max_tokens=24, stream=True
    )
    answers = {
        "chat completions": "".join(chunk.choices[0].delta.content or "" for chunk in chat if chunk.choices)
    }
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24)
    answers["responses"] = response.output_text
    plain = "The capital of Italy is Rome. The capital of France is"
    answers["completions"] = (
        client.completions.create(model=MODEL, prompt=plain, temperature=0, max_tokens=8).choices[0].text
    )
    message = Anthropic(base_url=URL, api_key="none").messages.create(
        model=MODEL, messages=MESSAGES, max_tokens=24, extra_body={"temperature": 0}
    )
    answers["messages"] = "".join(block.text for block in message.content if block.type == "text")
    for dialect, answer in answers.items():
        assert "Paris" in answer, (dialect, answer)
        print(f"       {dialect}: {answer.strip()[:60]}")


if __name__ == "__main__":
    main()
