"""The questions of the gate, as data: constants only, no import, so that anything may read them.

The answers are short and not open to taste: a number, a call with one argument, an object with two
fields. `gate_checks.Questions` takes its defaults from here.
"""

ARITHMETIC_PROMPT = "What is 17 + 25? Answer with the number only."
ARITHMETIC_ANSWER = "42"

GREETING_PROMPT = "你好"

WEATHER_PROMPT = "What is the weather in Berlin?"
WEATHER_CITY = "Berlin"
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {
            "type": "object",
            # The length bound keeps a forced call short: grammar-bound decoding of a free string may not end.
            "properties": {"city": {"type": "string", "description": "Name of the city.", "maxLength": 40}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

# Two calls in one answer.
PARALLEL_PROMPT = "What is the weather in Berlin and in Paris?"
PARALLEL_CITIES = ("Berlin", "Paris")

CAPITAL_PROMPT = "Name the capital of France as JSON."
CAPITAL_ANSWER = {"city": "Paris", "country": "France"}
CAPITAL_SCHEMA_NAME = "capital"
CAPITAL_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
    },
    "required": ["city", "country"],
    "additionalProperties": False,
}

UNKNOWN_MODEL = "metalserve-gate-no-such-model"

# Room for an answer. A model that thinks first needs far more before the first word of the answer.
MAX_TOKENS = 256
MAX_TOKENS_THINKING = 4096
