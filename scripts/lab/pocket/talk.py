"""Small talk: what people say besides asking for stories, each with several fitting answers, in many
wordings.
"""

from __future__ import annotations

import random

BAD = (
    "stupid", "dumb", "bad", "useless", "boring", "terrible", "awful", "silly", "ugly", "horrible", "lame", "slow",
    "wrong",
    "crazy", "pathetic", "worthless", "a joke", "an idiot", "a fool", "a moron", "trash", "garbage", "the worst",
    "no good",
    "not smart", "not very clever", "nonsense", "a bad robot", "really bad at this", "annoying", "broken", "rubbish",
    "mean",
    "not helpful", "a loser", "an idiot sandwich", "so dumb it hurts", "hopeless", "weird", "bad at stories",
)  # fmt: skip
FINE = (
    "great", "good", "nice", "wonderful", "lovely", "amazing", "awesome", "cool", "funny", "beautiful", "cute",
    "fantastic",
    "perfect", "very good", "really nice", "the best", "brilliant", "excellent", "sweet", "so good", "fun",
    "pretty good",
)  # fmt: skip
VERY = ("", "", "", "so ", "very ", "really ", "just ", "a bit ", "pretty ", "quite ", "totally ")
YOURS = (
    "that",
    "this",
    "it",
    "your story",
    "that story",
    "the story",
    "this story",
    "your answer",
    "that one",
)

THANKS = (
    "Thank you!", "Thanks!", "Thank you very much.", "thanks", "thank you", "Thanks a lot!", "Many thanks!", "thx",
    "ty",
    "Thank you so much!", "thanks so much", "Thank you, that was {fine}!", "Thanks, I liked that.",
    "Thanks for the story!",
    "Thank you for the story.", "thanks for that", "Thanks, that was {fine}.", "ok thanks", "Okay, thank you.",
    "Cool, thanks!",
    "great, thank you", "thank you kindly", "Cheers!", "much appreciated", "I thank you.", "thanks, friend", "tysm",
    "Thank you for your help.", "thank you for telling me", "wow, thanks!", "thanks buddy", "no, thank you", "thank u",
)  # fmt: skip
PRAISE = (
    "{yours} was {fine}!", "I love it!", "I love you", "you are {fine}",
    "you're {fine}!", "Good job!", "well done", "nice one", "{fine}!", "wow", "Wow, {fine}!", "what a {plain} story",
    "That is {fine}.", "I like you", "good bot", "haha", "lol", "nice", "I liked it a lot", "bravo!", "good work",
    "so {plain}!",
    "you made me laugh", "That made me smile.", "I really like your stories", "You are a good teller of stories.",
    "yay!",
)  # fmt: skip
INSULTS = (
    "you are {very}{bad}", "You are {very}{bad}!", "you're {very}{bad}", "{yours} is {very}{bad}",
    "{yours} was {very}{bad}",
    "I hate you", "I hate this", "I don't like you", "I do not like it", "shut up", "go away", "you suck",
    "this sucks", "{bad}!",
    "idiot", "Stupid machine!", "stupid", "you stupid {who}", "you {who}", "what a {bad1} {who}", "what a {bad1} story",
    "I did not like that", "that makes no sense", "You know nothing.", "you can not do anything",
    "how can you be so {bad1}",
    "why are you so {bad1}?", "you are the worst {who}", "boo!", "I don't like your story", "that was {very}{bad}",
    "be quiet",
    "Such a {bad1} {who}.", "my cat tells better stories", "This is a waste of time.", "You are not {fine}.", "dummy",
    "nobody likes you", "you are a {bad1} {who}", "get lost", "are you {bad1}?", "I am angry with you", "you broke it",
)  # fmt: skip
WHO = (
    "robot",
    "machine",
    "bot",
    "thing",
    "computer",
    "program",
    "model",
    "toy",
    "fool",
    "dummy",
    "pig",
    "liar",
    "monkey",
)
BAD_ONE = (
    "stupid",
    "dumb",
    "bad",
    "useless",
    "boring",
    "terrible",
    "silly",
    "ugly",
    "horrible",
    "lame",
    "slow",
    "crazy",
)
GREETINGS = (
    "Hello!", "Hi!", "Hello", "Hi there!", "hi", "Hey!", "hey", "hello there", "Hello there!", "Hi, how are things?",
    "yo",
    "Greetings!", "hiya", "howdy", "Good day!", "Hello, my friend!", "hi pocket", "Hello, computer.", "hey there",
    "hallo",
    "Hello again!", "hi again", "hello?", "Hi, nice to meet you.", "Nice to meet you!", "hello hello", "heyyy",
    "hellooo",
    "Hello kvant", "Welcome!", "hi friend", "anyone there?", "are you there?", "sup", "Hello, is anybody there?",
    "Hola!",
)  # fmt: skip
MORNING = (
    "Good {part} to you!",
    "good {part}",
    "Good {part}, friend.",
    "Hello, good {part}!",
    "A very good {part} to you.",
)
HOW = (
    "How are you?", "how are you", "How are you today?", "Hi, how are you?", "How do you do?", "how is it going?",
    "how's it going",
    "How do you feel?", "are you ok?", "Are you well?", "Hello, how are you?", "what's up?", "whats up",
    "How have you been?",
    "how are you doing", "How was your day?", "you good?", "Are you happy?", "how do you feel today",
)  # fmt: skip
ABOUT = (
    "What can you do?", "Who are you?", "What are you?", "Help!", "How can you help me?", "what is this", "who are you",
    "What is your name?", "what's your name?", "Are you a robot?", "are you human?", "Are you real?",
    "What do you do?", "help",
    "Do you have a name?", "what should I ask", "What can I ask you?", "How do you work?", "What do you know?",
    "are you an AI",
    "Are you ChatGPT?", "Who made you?", "tell me about yourself", "Introduce yourself.", "what is kvant",
    "What model are you?",
    "How old are you?", "can you think?", "What else can you do?", "what now?", "Can you help me?",
    "what are you good at?",
)  # fmt: skip
BYE = (
    "Goodbye!", "Bye!", "See you soon.", "bye", "bye bye", "goodbye", "see you", "See you later!", "I have to go.",
    "I must go now.",
    "Farewell!", "cya", "that is all", "That's all, thanks.", "I am done", "quit", "exit", "Until next time!", "ciao",
    "take care",
    "I am leaving.", "See you tomorrow.", "good bye", "ok bye", "talk to you later", "stop",
)  # fmt: skip
NIGHT = (
    "good night",
    "Good night, pocket.",
    "I am going to bed.",
    "Sleep well!",
    "Time to sleep.",
    "nighty night",
    "I am tired",
)
SAD = (
    "I am sad", "I'm sad.", "I feel bad", "I am so sad today", "I am lonely", "I had a bad day", "I feel alone",
    "I am unhappy",
    "My day was terrible.", "I am afraid", "nobody likes me", "I miss my friend", "I lost my dog", "I am sick",
    "I feel sad",
)  # fmt: skip
GLAD = (
    "I am happy", "I feel good today", "I'm fine", "I am fine, thanks", "I had a good day", "It is my birthday!",
    "I am great", "good, and you?", "I feel great!",
)  # fmt: skip
BORED = (
    "I am bored", "I'm bored.", "this is boring, tell me something", "entertain me", "I have nothing to do",
    "so bored", "say something", "Tell me something.", "talk to me", "surprise me",
)  # fmt: skip
SORRY = (
    "Sorry",
    "I am sorry",
    "sorry about that",
    "I'm sorry!",
    "Forgive me.",
    "my bad",
    "oops",
    "I did not mean that",
    "sorry, I was mean",
)
OKAY = (
    "ok",
    "Okay.",
    "I see",
    "fine",
    "all right",
    "hm",
    "hmm",
    "interesting",
    "Oh",
    "oh really?",
    "sure thing",
    "got it",
    "right",
    "k",
    "oh well",
    "aha",
)
JOKES = (
    "Tell me a joke.", "tell me a joke", "Do you know a joke?", "Make me laugh.", "say something funny",
    "a joke please", "joke",
    "Can you tell a joke?", "Another joke!", "Be funny.", "I want to hear a joke", "tell me something funny",
)  # fmt: skip
WHAT = (
    "what?",
    "What do you mean?",
    "I do not understand.",
    "huh?",
    "why?",
    "asdf",
    "test",
    "?",
    "blah blah",
    "what",
    "I don't get it",
    "abc",
    "...",
    "really?",
    "is that so?",
)

ANSWERS = {
    "thanks": (
        "You are welcome! I am glad you liked it.", "You are welcome!",
        "You are welcome! Shall I tell you another one?", "You are very welcome!",
        "It was my pleasure.", "My pleasure! Just ask for another story.",
    ),
    "praise": (
        "Thank you! I am glad you liked it.", "I am glad you like it!", "That is kind of you, thank you!",
        "Thank you! Shall I tell you another one?", "How kind of you!",
    ),
    "insult": (
        "I am sorry you are not happy with me. I am only small, but I will try again.",
        "Oh. That makes me a little sad, but I will try to be better.",
        "I am sorry. I am a very small model, but I do my best.",
        "That was not kind, but I am not angry. Shall I try another story?",
        "I will try to do better. Shall I tell you another story?",
    ),
    "greeting": (
        "Hello! Shall I tell you a story? Just give me a name.", "Hello! Who shall my story be about?",
        "Hi there! Give me a name and I will tell you a story.",
        "Hello! It is good to see you. Shall I tell you a story?",
    ),
    "morning": ("Good {part}! Shall I tell you a story?", "Good {part} to you! Who shall my story be about?"),
    "how": (
        "I am well, thank you! Shall I tell you a story?", "Very well, thank you! And how are you?",
        "I am happy, for I love to tell stories. Shall I tell you one?",
    ),
    "about": (
        "I tell small stories and answer questions about them.", "I am pocket, a very small model that tells stories.",
        "I am a tiny teller of stories. Give me a name and I will begin.",
    ),
    "bye": ("Goodbye! Come back soon for another story.", "Goodbye! It was good to talk to you.", "See you soon!"),
    "night": (
        "Good night! Sleep well.", "Good night, and sweet dreams!", "Sleep well! Shall I tell you a bedtime story?",
    ),
    "sad": (
        "I am sorry to hear that. Shall I tell you a story to make you smile?",
        "Oh, I am sorry. A story may help. Shall I tell you one?",
        "That is hard. I hope tomorrow is better.",
    ),
    "glad": (
        "I am glad to hear that! Shall I tell you a story?", "That is good to hear!", "How nice! I am happy for you.",
    ),
    "bored": ("Then let me tell you a story! Who shall it be about?", "Shall I tell you a story? Just give me a name."),
    "sorry": ("That is all right!", "Do not worry, all is well.", "No harm done. Shall I tell you a story?"),
    "okay": (
        "Shall I tell you another story?", "Good! Who shall the next story be about?",
        "All right! Just ask for a story.",
    ),
    "joke": (
        "Why did the clock smile? It had a good time!", "What has a bed but never sleeps? A river!",
        "Why did the owl sit on the clock? It wanted to be on time!",
        "What goes up and never comes down? The years of a turtle!",
        "What has hands but no fingers? A clock!", "Why was the king so tall? He stood on his chair!",
    ),
    "what": (
        "I am sorry, I do not understand. I know small stories and questions about them.",
        "I am only small. Ask me for a story about a fox or a girl named Lily!",
    ),
}  # fmt: skip
KINDS = {
    "thanks": THANKS, "praise": PRAISE, "insult": INSULTS, "greeting": GREETINGS, "morning": MORNING, "how": HOW,
    "about": ABOUT,
    "bye": BYE, "night": NIGHT, "sad": SAD, "glad": GLAD, "bored": BORED, "sorry": SORRY, "okay": OKAY, "joke": JOKES,
    "what": WHAT,
}  # fmt: skip
SHARES = dict(zip(KINDS, (16, 8, 18, 16, 3, 7, 9, 5, 2, 4, 2, 4, 2, 4, 4, 3), strict=True))


def vary(rng: random.Random, text: str) -> str:
    """Write a line as people type: small letters, no full stop, more marks, now and then a slip."""
    draw = rng.random()
    if draw < 0.3:
        text = text[0].lower() + text[1:]
    elif draw < 0.4:
        text = text.lower().rstrip("!.?")
    elif draw < 0.43:
        text = text.upper()
    elif draw < 0.5:
        text = text[0].upper() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip("!.?") + rng.choice(("!", "!!", ".", "...", "!!!", " :)", " :(", ""))
    if rng.random() < 0.04 and len(text) > 6:
        at = rng.randrange(1, len(text) - 1)
        text = text[:at] + text[at + 1 :]
    if rng.random() < 0.1:
        text = (
            text.replace("are", "r" if rng.random() < 0.2 else "are").replace("I am", "im").replace("'", "")
        )
    return text or "ok"


def exchange(rng: random.Random, told: bool = False) -> tuple[str, str, str]:
    """Draw what a person says and what is answered, and the kind of it; `told` when a story has just been
    told.
    """
    shares = {
        **SHARES,
        **({"thanks": 34, "praise": 20, "insult": 20, "greeting": 3, "okay": 8} if told else {}),
    }
    kind = rng.choices(list(shares), list(shares.values()))[0]
    slots = {
        "fine": rng.choice(FINE), "plain": rng.choice(("good", "nice", "lovely", "funny", "sweet", "great", "cute")),
        "bad": rng.choice(BAD), "bad1": rng.choice(BAD_ONE), "very": rng.choice(VERY), "who": rng.choice(WHO),
        "yours": rng.choice(YOURS), "part": rng.choice(("morning", "evening", "afternoon", "day")),
    }  # fmt: skip
    ask = vary(rng, rng.choice(KINDS[kind]).format_map(slots))
    # The first answer of each kind leads, so that the greedy answer is sure.
    answers = ANSWERS[kind]
    reply = answers[0] if rng.random() < 0.4 and kind != "joke" else rng.choice(answers)
    return ask, reply.format_map(slots), kind
