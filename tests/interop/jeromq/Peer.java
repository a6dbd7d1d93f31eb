import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.List;
import org.zeromq.SocketType;
import org.zeromq.ZContext;
import org.zeromq.ZEvent;
import org.zeromq.ZMQ;
import org.zeromq.ZMonitor;

/**
 * Sockets of a router or an engine on JeroMQ, for tests. The program prints the messages that it gets.
 *
 * <pre>
 *   Peer SECONDS subscribe connect|bind ENDPOINT TOPIC [OPTION...]
 *   Peer SECONDS publish connect|bind ENDPOINT "" [OPTION...]           (sends a message for each line FRAME,FRAME...)
 *   Peer SECONDS ask dealer|req ENDPOINT FRAME,FRAME... [OPTION...]     (frames in hex)
 *
 *   heartbeat=MS                       a PING every MS milliseconds; the timeout of its answer is ten times as long
 *   curve=SERVER,PUBLIC,SECRET         a CURVE client (Z85)
 *   curve-server=PUBLIC,SECRET         a CURVE server that accepts every client
 * </pre>
 *
 * Each printed line is a JSON object with the kind of event ("started", "connected", "disconnected", "message") and the
 * frames of a message in hex. "connected" means that the handshake is complete. The program ends after SECONDS, or when
 * its input ends.
 */
public final class Peer {
    private static final String EVENTS = "inproc://events";

    private Peer() {}

    private static synchronized void print(String what, String more) {
        System.out.println("{\"what\": \"" + what + "\"" + more + "}");
        System.out.flush();
    }

    private static String hex(byte[] frame) {
        StringBuilder text = new StringBuilder(2 * frame.length);
        for (byte value : frame) {
            text.append(Character.forDigit((value >> 4) & 15, 16)).append(Character.forDigit(value & 15, 16));
        }
        return text.toString();
    }

    private static byte[] unhex(String text) {
        byte[] frame = new byte[text.length() / 2];
        for (int at = 0; at < frame.length; at++) {
            frame[at] = (byte) Integer.parseInt(text.substring(2 * at, 2 * at + 2), 16);
        }
        return frame;
    }

    private static void option(ZMQ.Socket socket, String option) {
        String[] found = option.split("=", 2);
        switch (found[0]) {
            case "heartbeat":
                int interval = Integer.parseInt(found[1]);
                socket.setHeartbeatIvl(interval);
                socket.setHeartbeatTimeout(10 * interval);
                break;
            case "curve":
                String[] keys = found[1].split(",");
                socket.setCurveServerKey(ZMQ.Curve.z85Decode(keys[0]));
                socket.setCurvePublicKey(ZMQ.Curve.z85Decode(keys[1]));
                socket.setCurveSecretKey(ZMQ.Curve.z85Decode(keys[2]));
                break;
            case "curve-server":
                String[] pair = found[1].split(",");
                socket.setCurveServer(true);
                socket.setCurvePublicKey(ZMQ.Curve.z85Decode(pair[0]));
                socket.setCurveSecretKey(ZMQ.Curve.z85Decode(pair[1]));
                break;
            default:
                throw new IllegalArgumentException(option);
        }
    }

    /** Print a line for each new and each lost connection. */
    private static void watch(ZContext context) {
        ZMQ.Socket events = context.createSocket(SocketType.PAIR);
        events.connect(EVENTS);
        while (true) {
            ZMonitor.Event event = ZEvent.recv(events).getEvent();
            if (event == ZMonitor.Event.HANDSHAKE_PROTOCOL) {
                print("connected", "");
            } else if (event == ZMonitor.Event.DISCONNECTED) {
                print("disconnected", "");
            }
        }
    }

    /** End with the program that started this one. */
    private static void endWithInput() {
        try {
            while (System.in.read() >= 0) {}
        } catch (java.io.IOException lost) {
            // a read error also means that the parent has ended
        }
        Runtime.getRuntime().halt(0);
    }

    private static void send(ZMQ.Socket socket, String message) {
        String[] frames = message.split(",", -1);
        for (int at = 0; at < frames.length; at++) {
            socket.send(unhex(frames[at]), at + 1 < frames.length ? ZMQ.SNDMORE : 0);
        }
    }

    /** Send a message for each line of the input, and end with the program that started this one. */
    private static void publish(ZMQ.Socket socket) {
        new BufferedReader(new InputStreamReader(System.in)).lines().forEach(line -> send(socket, line));
        Runtime.getRuntime().halt(0);
    }

    private static SocketType type(String what, String how) {
        switch (what) {
            case "subscribe":
                return SocketType.SUB;
            case "publish":
                return SocketType.PUB;
            default:
                return how.equals("req") ? SocketType.REQ : SocketType.DEALER;
        }
    }

    private static void inBackground(Runnable task) {
        Thread thread = new Thread(task);
        thread.setDaemon(true);
        thread.start();
    }

    private static void endAfter(long seconds) {
        try {
            Thread.sleep(1000 * seconds);
        } catch (InterruptedException early) {
            // no thread interrupts this one
        }
        Runtime.getRuntime().halt(0);
    }

    public static void main(String[] arguments) {
        long seconds = Long.parseLong(arguments[0]);
        inBackground(() -> endAfter(seconds));
        boolean publishes = arguments[1].equals("publish");
        if (!publishes) {
            inBackground(Peer::endWithInput);
        }
        String how = arguments[2];
        String endpoint = arguments[3];
        ZContext context = new ZContext();
        ZMQ.Socket socket = context.createSocket(type(arguments[1], how));
        for (int at = 5; at < arguments.length; at++) {
            option(socket, arguments[at]);
        }
        socket.setSndHWM(0);
        socket.setRcvHWM(0); // with CURVE and a full queue, JeroMQ returns encrypted messages (its issue 1009)
        socket.setHandshakeIvl(5000); // 1 % of handshakes never begin (its issue 1022); the default is 30 s
        socket.monitor(EVENTS, ZMQ.EVENT_HANDSHAKE_PROTOCOL | ZMQ.EVENT_DISCONNECTED);
        inBackground(() -> watch(context));
        if (arguments[1].equals("subscribe")) {
            socket.subscribe(arguments[4]);
        }
        if (how.equals("bind")) {
            socket.bind(endpoint);
        } else {
            socket.connect(endpoint);
        }
        print("started", "");
        if (publishes) {
            publish(socket);
        }
        if (arguments[1].equals("ask")) {
            send(socket, arguments[4]);
        }
        do {
            List<String> frames = new ArrayList<>();
            do {
                frames.add("\"" + hex(socket.recv()) + "\"");
            } while (socket.hasReceiveMore());
            print("message", ", \"frames\": [" + String.join(", ", frames) + "]");
        } while (!how.equals("req"));
        endAfter(seconds);
    }
}
