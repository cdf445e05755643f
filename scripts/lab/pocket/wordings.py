"""Wordings of requests for stories, of what is said after one, and of requests that cannot be met."""

from __future__ import annotations

STARTS = (
    "Tell me a story", "Tell me a story", "Tell me a story", "tell me a story", "Tell me a short story",
    "a short story", "A story",
    "story", "Write a story", "Write a short story", "Write me a story", "Can you tell me a story",
    "Please tell me a story",
    "I want a story", "I want to hear a story", "I would like to hear a story", "Give me a story", "Make up a story",
    "Tell a story",
    "Could you tell me a tale", "Tell me a tale", "a tale", "Tell me a bedtime story", "Tell me a fairy tale",
    "let's hear a story",
    "Tell me something", "Do you know a story", "Write a tale", "Invent a story", "Create a story",
    "Create a short story",
    "Tell me a funny story", "Tell me a scary story", "Tell me a nice story", "Tell me a long story",
    "Tell my son a story",
    "write", "tell me", "Generate a story", "Can you write a story", "Please write a story", "now a story",
    "How about a story",
    "Tell us a story", "Tell me a little story", "short story", "another story", "I need a story", "Let me hear a tale",
)  # fmt: skip
AGAIN = (
    "Tell me another story", "Another story", "another story", "Tell me a different story", "Now tell me a story",
    "Now a story",
    "Tell me a new story", "a new story", "Now one", "another one", "Tell me another one", "one more", "And now one",
    "And one",
    "Tell me one more story", "Next, tell me a story", "Please tell me another", "Can you tell me another story",
    "a different one",
    "How about one", "Now write a story", "tell me a second story", "I want another story", "Give me another one",
)  # fmt: skip
MORE = (
    "Another one!", "another one", "Tell me another story.", "another", "Tell me a different story.", "One more!",
    "one more please",
    "again", "Again!", "Tell me another one.", "more", "more!", "Something different, please.", "a new one", "Next!",
    "next story",
    "Tell me a story.", "Tell me a new story.", "Can I hear another one?", "Do you know another story?", "and another",
    "I want another story", "Do you have a different story?", "once more", "Tell me one more story.",
    "A different one, please.",
    "Tell me a third story.", "a third one", "not that one, another", "I know that one. Tell me another.",
    "New story please",
    "something else", "Tell me something new.", "No, a different story.", "yes, another one please",
    "keep going, another one",
)  # fmt: skip
OPEN = (
    "Tell me a story.", "tell me a story", "Can you tell me a story?", "a story please", "story", "I want a story",
    "story time!",
    "Tell me a bedtime story.", "Tell me a short story.", "Write a story.", "Please tell me a story.", "Tell a story",
    "Surprise me with a story.",
    "tell me any story", "Yes", "yes please", "Yes!", "sure", "Yes, please.", "go on", "ok tell me", "yeah", "do it",
    "Please do.", "You choose.",
    "any story", "anything", "I do not care, just tell me a story", "tell me something nice", "Once upon a time",
    "yep", "okay, a story",
)  # fmt: skip
RETORTS = (
    "Here is a different one.",
    "All right, a new one.",
    "Here comes another.",
    "With joy!",
    "Then listen.",
)
SEQUELS = (
    "The next day {N} and {H} met again {home}. They talked about the {thing} and laughed. "
    "In the evening {he} went home, and all was well.",
    "{N} lived {home} for many more years. Every summer {H} came to see {him}. And they always had tea and cake.",
    "One morning {H} came to the house of {N} with a big cake. They ate it all. "
    "Then they went out to find a new adventure.",
    "A year later {N} helped {H} with a hard task. Now {H} was thankful too. So it goes with true friends.",
)  # fmt: skip
ON = (
    "What happened next?", "Continue.", "and then?", "go on", "What happened then?", "Then what?",
    "continue the story", "Tell me more.", "what next", "and after that?", "How does it go on?",
)  # fmt: skip
MORAL = (
    "What is the moral?",
    "What can I learn from this story?",
    "what does the story teach?",
    "What is the moral of the story?",
)
MORAL_ANSWER = "With a good friend even hard things can be done."
ELSE = (
    "What is the weather like?", "How do I fix my car?", "Write some code", "Who won the game?",
    "What is the capital of {w}?", "what is 2+2",
    "Write a poem about {w}.", "Explain {w} to me.", "How far is the moon?", "What time is it?",
    "Translate {w} into Spanish.", "What is {w}?",
    "who is {w}?", "Write an email to {w}.", "Give me a recipe for {w}.", "How do I cook {w}?", "Where is {w}?",
    "Summarize this text.",
    "Write a python function", "What is the news?", "Play {w}.", "Book a hotel", "How do I get to {w}?",
    "Define {w}.", "Solve {n} + {n}.",
    "How many people live in {w}?", "What is the meaning of life?", "Who is the president?", "List ten {w}.",
    "Compare {w} and {n}.",
    "What is {n} times {n}?", "how do plants grow", "Why is the sky blue?", "What should I eat?", "Fix this bug.",
    "Sing a song.", "What year is it?",
    "When did {w} begin?", "write a haiku", "Give me advice about {w}.", "Who wrote {w}?", "How does {w} work?",
    "count to {n}", "spell {w}",
)  # fmt: skip
REFUSALS = (
    "I am sorry, I only know small stories and questions about them.",
    "That is too hard for me. I only know small stories.",
    "I do not know that, for I am very small. But I can tell you a story.",
)  # fmt: skip
KIN = {
    "daughter": "she",
    "son": "he",
    "sister": "she",
    "brother": "he",
    "friend": None,
    "cat": None,
    "dog": None,
    "teddy": None,
}
