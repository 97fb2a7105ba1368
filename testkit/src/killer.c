/* A module that closes connections where it hurts another module most, in the middle of its writes: on each
 * keyspace event of the name in its first argument it kills all clients of the user in its second. The few
 * functions of the module API that it needs are declared here, as servers do not install the header. */
#include <string.h>

typedef struct Ctx Ctx;
typedef struct String String;
typedef int OnEvent(Ctx *, int type, const char *event, String *key);

enum { OK = 0, ERR = 1, API_VERSION = 1, NOTIFY_GENERIC = 1 << 2, NOTIFY_STRING = 1 << 3, NOTIFY_EXPIRED = 1 << 8 };

static void *(*call)(Ctx *, const char *command, const char *format, ...);
static void (*free_reply)(void *reply);
static char event_name[32], user[32];

static int on_event(Ctx *ctx, int type, const char *event, String *key) {
    (void)type;
    (void)key;
    if (strcmp(event, event_name) != 0) return OK;
    void *reply = call(ctx, "CLIENT", "ccc", "KILL", "USER", user);
    if (reply) free_reply(reply);
    return OK;
}

int RedisModule_OnLoad(Ctx *ctx, String **argv, int argc) {
    /* The server puts the function that finds all others first. */
    int (*get)(const char *, void *) = *(int (**)(const char *, void *))ctx;
    void (*set_attributes)(Ctx *, const char *name, int version, int api);
    const char *(*text)(String *, size_t *len);
    int (*subscribe)(Ctx *, int types, OnEvent *);
    if (argc != 2 || get("RedisModule_SetModuleAttribs", &set_attributes) || get("RedisModule_StringPtrLen", &text) ||
        get("RedisModule_SubscribeToKeyspaceEvents", &subscribe) || get("RedisModule_Call", &call) ||
        get("RedisModule_FreeCallReply", &free_reply))
        return ERR;
    set_attributes(ctx, "killer", 1, API_VERSION);
    strncpy(event_name, text(argv[0], NULL), sizeof event_name - 1);
    strncpy(user, text(argv[1], NULL), sizeof user - 1);
    return subscribe(ctx, NOTIFY_GENERIC | NOTIFY_STRING | NOTIFY_EXPIRED, on_event);
}
