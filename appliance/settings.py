"""Boot settings: the only reader of the environment (through `env`). Live settings: the database.

Every name is in deploy/env.example with its meaning and default.
"""

import logging
from pathlib import Path

from csp.constants import NONE, SELF

from appliance import env

# ---- core

BASE_DIR = Path(__file__).resolve().parent.parent
DATA_DIR = env.env_folder("APPLIANCE_DATA_DIR", BASE_DIR / "var")

DEBUG = env.env_bool("APPLIANCE_DEBUG", False)
SECRET_KEY = env.env_secret("SECRET_KEY", lambda: env.secret_from_file(DATA_DIR / "secret_key"))

INSTALLED_APPS = [
    "daphne",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "csp",
    "allauth",
    "allauth.account",
    "allauth.mfa",
    "appliance.accounts",
    "appliance.api_keys",
    "appliance.exposure",
    "appliance.quotas",
    "appliance.serving",
    "appliance.chat",
    "appliance.api",
    "appliance.console",
    "appliance.capacity",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "csp.middleware.CSPMiddleware",
    "appliance.exposure.secure_cookies.secure_cookies",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    # No route is outside the access layer unless its view says so (login_not_required).
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "appliance.error_pages.method_pages",
]

ROOT_URLCONF = "appliance.urls"
ASGI_APPLICATION = "appliance.asgi.application"
# Scripts post to /v1/...: a redirect to a slash would lose their body.
APPEND_SLASH = False

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

LANGUAGE_CODE = "en-us"
USE_I18N = False
USE_TZ = True
# The team's time zone: daily quotas reset at its midnight.
TIME_ZONE = env.env_time_zone("APPLIANCE_TIME_ZONE", "UTC")

# ---- database, cache, channel layer, tasks: embedded unless DATABASE_URL / REDIS_URL say else

DATABASE_URL = env.env_str("DATABASE_URL", "")
_DATABASE = env.env_database("DATABASE_URL")
REDIS_URL = env.env_str("REDIS_URL", "")

if _DATABASE is not None:
    DATABASES = {"default": _DATABASE}
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": DATA_DIR / "blockhouse.sqlite3",
            "OPTIONS": {
                # A deferred transaction that reads and then writes fails at once under load;
                # an immediate one waits its turn.
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
            },
            "TEST": {"NAME": DATA_DIR / "test-blockhouse.sqlite3"},
        }
    }

if REDIS_URL:
    CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": REDIS_URL,
            # A Redis that hangs must not hold up those who count or probe with it.
            "OPTIONS": {"socket_timeout": 2, "socket_connect_timeout": 2},
        }
    }
    CHANNEL_LAYERS = {
        "default": {
            "BACKEND": "channels_redis.core.RedisChannelLayer",
            # The layer waits for messages in calls of five seconds; a client that gives up after
            # as long (redis-py's default) ends every socket that was quiet for that time.
            "CONFIG": {"hosts": [{"address": REDIS_URL, "socket_timeout": 30}]},
        }
    }
    CELERY_BROKER_URL = REDIS_URL
else:
    CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
    _BROKER_DIR = DATA_DIR / "broker"
    for _folder in ("messages", "processed"):
        (_BROKER_DIR / _folder).mkdir(parents=True, exist_ok=True)
    CELERY_BROKER_URL = "filesystem://localhost//"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": str(_BROKER_DIR / "messages"),
        "data_folder_out": str(_BROKER_DIR / "messages"),
        "control_folder": str(_BROKER_DIR / "control"),
        "processed_folder": str(_BROKER_DIR / "processed"),
        "store_processed": False,
    }

CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TIMEZONE = TIME_ZONE
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BEAT_SCHEDULE = {
    "sign-of-life": {
        "task": "appliance.serving.tasks.sign_of_life",
        "schedule": 20.0,
        # Of many that piled up one is enough.
        "options": {"expires": 60.0},
    },
    "heal-reservations": {
        "task": "appliance.quotas.tasks.heal_reservations",
        "schedule": 300.0,
    },
    "expire-responses": {
        "task": "appliance.api.tasks.expire_responses",
        "schedule": 3600.0,
    },
    "roll-up-usage": {
        "task": "appliance.quotas.tasks.roll_up_usage",
        "schedule": 600.0,
    },
    "heal-capacity-tests": {
        "task": "appliance.capacity.tasks.heal_capacity",
        "schedule": 30.0,
    },
    "roll-up-load": {
        "task": "appliance.console.tasks.roll_up_load",
        "schedule": 300.0,
    },
}
CELERY_BEAT_SCHEDULE_FILENAME = str(DATA_DIR / "celerybeat-schedule")

# ---- sign-in

AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["appliance.accounts.sign_in.SignInBackend"]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "/"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]
ACCOUNT_ADAPTER = "appliance.accounts.adapter.AccountAdapter"
ACCOUNT_LOGIN_METHODS = {"username"}
ACCOUNT_SIGNUP_FIELDS = ["username*", "password1*", "password2*"]
ACCOUNT_EMAIL_VERIFICATION = "none"
ACCOUNT_LOGOUT_REDIRECT_URL = "/login/"
ACCOUNT_SESSION_REMEMBER = None
# "key" is user name and address together (see AccountAdapter), so that one attacker can lock
# neither a user out everywhere nor an office's other users.
ACCOUNT_RATE_LIMITS = {"login": "60/m/ip", "login_failed": "40/m/ip,5/5m/key"}
SESSION_COOKIE_AGE = 14 * 24 * 3600
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"

# ---- static files and headers

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"},
}
# Served from the source folders, so that no collect step stands between a change and the browser.
WHITENOISE_USE_FINDERS = True
WHITENOISE_AUTOREFRESH = DEBUG

CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": [NONE],
        "script-src": [SELF],
        "style-src": [SELF],
        "img-src": [SELF, "data:"],
        "font-src": [SELF],
        "connect-src": [SELF],
        "form-action": [SELF],
        "frame-ancestors": [NONE],
        "base-uri": [NONE],
    }
}
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CONTENT_TYPE_NOSNIFF = True
DATA_UPLOAD_MAX_MEMORY_SIZE = 16 * 1024 * 1024

# ---- first bind; afterwards the exposure page decides

APPLIANCE_HOST = env.env_str("APPLIANCE_HOST", "127.0.0.1")
APPLIANCE_PORT = env.env_int("APPLIANCE_PORT", 8000, low=1, high=65535)
# `serve` replaces this by the names that the exposure settings declare; never "*".
APPLIANCE_ALLOWED_HOSTS = env.env_list("APPLIANCE_ALLOWED_HOSTS")
ALLOWED_HOSTS = ["localhost", "127.0.0.1", "[::1]", *APPLIANCE_ALLOWED_HOSTS]

# Pages that may call the API from a browser; their users still need a key.
APPLIANCE_CORS_ORIGINS = frozenset(env.env_origins("APPLIANCE_CORS_ORIGINS"))

# ---- engine

MODELS_DIR = DATA_DIR / "models"
APPLIANCE_MODEL = env.env_str("APPLIANCE_MODEL", "")
APPLIANCE_DEVICE = env.env_str("APPLIANCE_DEVICE", "auto", allowed=("auto", "cpu", "cuda"))
APPLIANCE_DTYPE = env.env_str(
    "APPLIANCE_DTYPE", "auto", allowed=("auto", "float32", "bfloat16", "float16")
)
APPLIANCE_KV_DTYPE = env.env_str("APPLIANCE_KV_DTYPE", "auto", allowed=("auto", "int8"))
# 0 means: chosen by the engine.
APPLIANCE_THREADS = env.env_int("APPLIANCE_THREADS", 0, low=0, high=1024)
APPLIANCE_KV_MEMORY_MB = env.env_int("APPLIANCE_KV_MEMORY_MB", 0, low=0, high=10_000_000)
# Where `manage.py models pull ORG/MODEL` asks, and the file with its token, read at each pull.
APPLIANCE_HUB_URL = env.env_url("APPLIANCE_HUB_URL", "https://huggingface.co")
APPLIANCE_HUB_TOKEN_FILE = env.env_str("APPLIANCE_HUB_TOKEN_FILE", "")
# 0 keeps the ledger for ever.
APPLIANCE_LEDGER_DAYS = env.env_int("APPLIANCE_LEDGER_DAYS", 0, low=0, high=100_000)
APPLIANCE_DRAIN_SECONDS = env.env_int("APPLIANCE_DRAIN_SECONDS", 20, low=0, high=3600)

# ---- logs

LOG_LEVEL = env.env_str(
    "APPLIANCE_LOG_LEVEL", "INFO", allowed=("DEBUG", "INFO", "WARNING", "ERROR")
)


def _log_refusal_briefly(record: logging.LogRecord) -> bool:
    status = getattr(record, "status_code", 500)
    if status < 500:
        record.exc_info = None
    return status != 503


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    # Refusals are no faults: no stack for a 403, and nothing for a 503, which metrics count.
    "filters": {
        "refusals": {"()": "django.utils.log.CallbackFilter", "callback": _log_refusal_briefly}
    },
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": "WARNING"},
    "loggers": {
        **{name: {"level": LOG_LEVEL} for name in ("appliance", "inference", "kernels")},
        "django.request": {"filters": ["refusals"]},
    },
}
